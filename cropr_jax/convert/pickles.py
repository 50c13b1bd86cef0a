"""The `data.pkl` of a PyTorch checkpoint, without PyTorch and without running anything in it.

A pickle is a program for a stack machine whose instructions may import and call anything. This
machine has no instruction that imports, calls or sets an attribute: a global is looked up in
`torch_objects.GLOBALS`, whose few entries build plain descriptions, and every other name is
refused. Only the
instructions that `torch.save` writes are known. Containers come back as dict, list and tuple,
tensors as `Tensor` (where their numbers lie), and whatever else a checkpoint commonly holds beside
its weights as `Inert`.

Source of the instructions: CPython `Lib/pickletools.py`.
"""

import pickletools
import warnings
from collections.abc import Iterator
from typing import Any

from cropr_jax.convert.messages import shown
from cropr_jax.convert.torch_objects import GLOBALS, Global, Inert, look_up, storage
from cropr_jax.errors import ConfigError

# Bounds on memory: a checkpoint of 10,000 tensors takes 1.5 MB and half a million instructions.
MAX_BYTES = 64 << 20
MAX_INSTRUCTIONS = 4_000_000


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(self):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Carries out instructions, which go by their names in `pickletools`, and returns the top.

        Long because every instruction is a case of its own.

        Raises:
          ConfigError: on what no PyTorch checkpoint holds.
          IndexError, KeyError, ValueError: if the stack, an argument or the end is missing.
        """
        push, pop = self.stack.append, self.stack.pop
        instructions: Iterator[tuple[Any, Any, Any]] = pickletools.genops(data)
        for count, (opcode, arg, _) in enumerate(instructions):
            if count > MAX_INSTRUCTIONS:
                raise ConfigError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
            match opcode.name:
                case "BINPUT" | "LONG_BINPUT":
                    self.memo[arg] = self.stack[-1]
                case "MEMOIZE":
                    self.memo[len(self.memo)] = self.stack[-1]
                case "BINGET" | "LONG_BINGET":
                    push(self.memo[arg])
                case "BININT1" | "BININT2" | "BININT" | "LONG1" | "LONG4":
                    # Longer ones could be chosen so that all collide as keys of a dict.
                    if arg.bit_length() > 64:
                        raise ConfigError(f"it holds an integer of {arg.bit_length()} bits")
                    push(arg)
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8" | "BINFLOAT":
                    push(arg)
                case "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
                    push(arg)
                case "NEWTRUE" | "NEWFALSE":
                    push(opcode.name == "NEWTRUE")
                case "NONE":
                    push(None)
                case "MARK":
                    self.marks.append(len(self.stack))
                case "EMPTY_TUPLE":
                    push(())
                case "TUPLE1":
                    push((pop(),))
                case "TUPLE2":
                    push((pop(-2), pop()))
                case "TUPLE3":
                    push((pop(-3), pop(-2), pop()))
                case "TUPLE":
                    push(tuple(self.pop_to_mark()))
                case "EMPTY_LIST":
                    push([])
                case "EMPTY_DICT":
                    push({})
                case "EMPTY_SET":
                    push(Inert("builtins.set"))
                case "APPEND":
                    self.add(list, [pop()])
                case "APPENDS":
                    self.add(list, self.pop_to_mark())
                case "ADDITEMS":
                    self.add(Inert, self.pop_to_mark())
                case "SETITEM":
                    self.add(dict, [pop(-2), pop()])
                case "SETITEMS":
                    self.add(dict, self.pop_to_mark())
                case "BINPERSID":
                    push(storage(pop()))
                case "GLOBAL":
                    push(look_up(arg.replace(" ", ".", 1)))
                case "STACK_GLOBAL":
                    match pop(-2), pop():
                        case str(module), str(name):
                            push(look_up(f"{module}.{name}"))
                        case _:
                            raise ConfigError("it asks for a name that is no text")
                case "REDUCE" | "NEWOBJ":
                    args = pop()
                    push(self.built(opcode.name, pop(), args))
                case "BUILD":
                    # The state of an inert object or the `_metadata` of a state_dict: not kept.
                    pop()
                    if not isinstance(self.stack[-1], Inert | dict):
                        raise ConfigError(f"it sets the state of a {type(self.stack[-1]).__name__}")
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case _:
                    raise ConfigError(
                        f"it holds the instruction {opcode.name}, which PyTorch never writes"
                    )
        return pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def add(self, kind: type, items: list[Any]) -> None:
        """Puts items into the container on top, which must be of `kind`."""
        target = self.stack[-1]
        if type(target) is not kind:
            raise ConfigError(f"it puts items of a {kind.__name__} into a {type(target).__name__}")
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, dict):
            keys = items[::2]
            # Scalars alone: hashing a tuple nested a million times would exhaust the C stack.
            if not all(isinstance(key, str | int | float | None) for key in keys):
                raise ConfigError("it has a key of a dict that is neither text nor number")
            target.update(zip(keys, items[1::2], strict=True))

    def built(self, opcode: str, function: Any, args: Any) -> Any:
        """What a call with `args` describes, if `function` is a name that we know."""
        name = function.name if isinstance(function, Global) else type(function).__name__
        if name not in GLOBALS or type(args) is not tuple:
            raise ConfigError(f"it calls {shown(name)} by {opcode}, which PyTorch never writes")
        return GLOBALS[name](args)


def loads(data: bytes) -> Any:
    """What a pickle of `torch.save` describes; no code of it is run.

    Args:
      data: content of `data.pkl`.

    Returns:
      dict, list, tuple, text, bytes and numbers, with `Tensor` and `Inert` leaves. Containers
      may be shared or nested without bound: walk them with care.

    Raises:
      ConfigError: on any name, instruction or shape that is not expected, and on a pickle that is
        cut short, damaged or too large. The message does not name the file.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"its pickle has more than {MAX_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pickletools decodes escapes in names
            return _Machine().run(data)
    except ConfigError:
        raise
    except (IndexError, KeyError, ValueError, Warning) as error:
        # An empty stack, an unknown memo entry, an argument that is cut short or no UTF-8.
        raise ConfigError(f"its pickle is cut short or damaged ({error})") from error
