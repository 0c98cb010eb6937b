"""Torch files as an attacker writes them, byte for byte."""

import zipfile


def number(value):
    """A pickled whole number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) if value else b""
    return b"\x8a" + bytes([len(data)]) + data


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def tensor(shape, strides, *, elements, key="0"):
    """A pickled float32 tensor that claims this shape over a storage that claims `elements`."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(elements) + b"tQ"
    sizes, steps = (b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, strides))
    empty = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + sizes + steps + b"\x89" + empty + b"tR"


def mapping(items):
    """A pickled dictionary of pickled values."""
    return b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


def archive(path, pickle, *, compression=zipfile.ZIP_STORED, data=bytes(16), **members):
    """A file as torch.save lays it out, around this pickle."""
    parts = {"data.pkl": b"\x80\x02" + pickle + b".", "byteorder": b"little", "data/0": data, "version": b"3\n"}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {**parts, **members}.items():
            file.writestr(f"archive/{name}", content)
    return path
