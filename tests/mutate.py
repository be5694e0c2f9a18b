"""Valid bytes made invalid, the same way for the same seed."""

import random

_BITS = [b"{", b"]", b'"', b"\xff", b"1e999", b"null", b"-1", b"\0" * 8, b"\xff" * 8, b"\xe2\x82", b"\xed\xa0\x80"]
_TEXTS = [b"\r\n", b" " * 40, b"\0" * 50, b"<|im_end|>", b"\xef\xbb\xbf", b"\x1b[2J", b"a" * 300, b"\xf0\x9f\x98\x80"]


def mutate(data: bytes, seed: int, within: int | None = None) -> bytes:
    """`data` with a few of its bytes, of the first `within`, changed, cut out, doubled or put in."""
    chance = random.Random(seed)
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, count = chance.randrange(min(len(mutated), within or len(mutated)) + 1), chance.randint(1, 9)
        how = chance.randrange(5)
        if how == 0:
            mutated[at : at + count] = chance.randbytes(count)
        elif how == 1:
            del mutated[at : at + count]
        elif how == 2:
            mutated[at:at] = mutated[at : at + count]
        elif how == 3:
            mutated[at:at] = chance.choice(_BITS + _TEXTS)
        elif chance.random() < 0.2:
            del mutated[at:]
    return bytes(mutated)
