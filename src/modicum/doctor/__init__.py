"""Self-checks on the user's own recipe, data, checkpoint and machine: each can fail, and says in a line what it saw."""
