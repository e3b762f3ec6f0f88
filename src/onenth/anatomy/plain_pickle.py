"""Pickles of plain containers, numbers and strings, read so that nothing of them runs.

Only the opcodes that build such things are known; whatever would import or call something is refused before it
happens. Memory and time grow with the file, whatever is in it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from onenth.errors import AnatomyError

_PLAIN_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
_CODE_OPCODES = (
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.REDUCE),
    *(pickle.BUILD, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.BINPERSID),
)


class _Bytes(io.BytesIO):
    """Bytes whose end is an error wherever more of them are wanted."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if size is not None and len(found) < size:
            raise EOFError
        return found


def _refuse_code(*_: object) -> NoReturn:
    raise AnatomyError("refused: it holds pickled code, which a snapshot does not")


def _refuse(*_: object) -> NoReturn:
    raise AnatomyError("not a snapshot: its pickle holds more than plain containers, numbers and strings")


def _set_items(target: object, items: list[Any]) -> None:
    """Keys are strings: to hash tuples nested deep enough ends the process, and numbers can be made to collide."""
    if type(target) is not dict or not all(type(key) is str for key in items[::2]):
        _refuse()
    target.update(zip(items[::2], items[1::2], strict=True))


def _set_item(unpickler: Any) -> None:
    value, key = unpickler.stack.pop(), unpickler.stack.pop()
    _set_items(unpickler.stack[-1], [key, value])


def _set_marked_items(unpickler: Any) -> None:
    items = unpickler.pop_mark()
    _set_items(unpickler.stack[-1], items)


class _PlainUnpickler(pickle._Unpickler):
    """Knows the few opcodes of plain containers, and no other.

    The one in Python, not the one in C: its memo is a dictionary, so that a few bytes cannot ask for gigabytes of it.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **dict.fromkeys(range(256), _refuse),
        **dict.fromkeys((code[0] for code in _CODE_OPCODES), _refuse_code),
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN_OPCODES},
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_marked_items,
    }

    def find_class(self, module: str, name: str) -> NoReturn:
        """Nothing can be imported."""
        _refuse_code()

    def persistent_load(self, pid: object) -> NoReturn:
        """Nothing can be looked up."""
        _refuse_code()


def plain_pickle(data: bytes) -> object:
    """What a pickle of plain containers, numbers and strings holds. Raises AnatomyError, one line that says why."""
    if data[:1] != pickle.PROTO:
        raise AnatomyError("not a snapshot: not a binary pickle")
    try:
        return _PlainUnpickler(_Bytes(data)).load()
    except AnatomyError:
        raise
    except EOFError as error:
        raise AnatomyError("the file is cut short") from error
    except Exception as error:
        # What is built is plain, so that nothing but the file itself can be at fault.
        exhausted = "exhausted" in str(error)
        raise AnatomyError("the file is cut short" if exhausted else "not a snapshot: a damaged pickle") from error
