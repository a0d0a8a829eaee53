"""Ways to damage the bytes of a file, in place, from a random.Random."""


def flip(data, rng):
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def truncate(data, rng):
    del data[rng.randrange(len(data)) :]


def extend(data, rng):
    data += rng.randbytes(rng.randrange(1, 2000))


def zero(data, rng):
    at = rng.randrange(len(data))
    size = min(rng.choice([1, 16, 512, 4096]), len(data) - at)
    data[at : at + size] = bytes(size)


def splice(data, rng):
    """A part of the file takes the place of another."""
    size = rng.randrange(1, 600)
    at, source = rng.randrange(len(data)), rng.randrange(len(data))
    data[at : at + size] = data[source : source + size]


DAMAGE = (flip, truncate, extend, zero, splice)
