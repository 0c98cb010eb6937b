"""The one exception that speaks to the user."""


class UserError(Exception):
    """Something the user can mend: the message names the file, line or field, what was expected, and how to mend it.

    The command line prints it without a traceback and exits with status 2. Several faults of one input are one error
    with a line each, so that they are mended in one go. Anything else that escapes is our fault: status 1.
    """
