"""Programs written as text in tests.

    program = listing('''
        rank 0
          F s0 m0
          SEND_F s0 m0 >r1
        rank 1: RECV_F s1 m0 <r0, F s1 m0
    ''')

One op per line, or several separated by commas; text after `#` is dropped. `show` writes the same form,
`edited` changes some of it.
"""

import re

from zbc.ir import Op, Placement, Program, parse_line

_HEADER = re.compile(r"rank (\d+):?")


def listing(
    text: str, placement: Placement | None = None, *, microbatches: int | None = None, slices: int | None = None
) -> Program:
    """The program of a listing.

    By default stages are placed one per rank, and microbatches and slices are counted from the ops. A printed peer must
    match the placement.
    """
    ranks: list[list[Op]] = []
    peers: list[tuple[Op, int]] = []
    for line in text.splitlines():
        rest = line.partition("#")[0].strip()
        header = _HEADER.match(rest)
        if header:
            if int(header[1]) != len(ranks):
                raise ValueError(f"rank {header[1]} comes after {len(ranks)} ranks")
            ranks.append([])
            rest = rest[header.end() :].strip()
        for part in filter(None, (part.strip() for part in rest.split(","))):
            op, peer = parse_line(part)
            ranks[-1].append(op)
            if peer is not None:
                peers.append((op, peer))
    placement = placement or Placement.linear(len(ranks))
    for op, peer in peers:
        if placement.peer(op) != peer:
            raise ValueError(f"{op} has peer {placement.peer(op)}, the listing says {peer}")
    ops = [op for rank in ranks for op in rank]
    m = 1 + max((op.mb for op in ops), default=0) if microbatches is None else microbatches
    k = 1 + max((op.slice for op in ops), default=0) if slices is None else slices
    return Program(placement, m, tuple(map(tuple, ranks)), ("listing",), k)


def show(program: Program) -> str:
    """The listing of a program."""
    lines = []
    for rank, ops in enumerate(program.ranks):
        lines.append(f"rank {rank}")
        lines += [f"  {program.placement.text(op)}" for op in ops]
    return "\n".join(lines)


def edited(program: Program, *edits: tuple[int, str, str]) -> Program:
    """The program with something else in the lists of ranks: (rank, pattern, what stands there instead)."""
    texts = [", ".join(map(str, ops)) for ops in program.ranks]
    for rank, old, new in edits:
        texts[rank] = re.sub(old, new, texts[rank])
    ranks = [[Op.parse(part) for part in text.split(", ") if part] for text in texts]
    return program.with_ranks(ranks, "edited")
