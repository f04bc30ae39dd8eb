"""Each check of a program by itself."""

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.faults import message_faults, op_faults
from zbc.compiler.graph import build
from zbc.errors import ZbcError, raise_found


def check_complete(program):
    raise_found(op_faults(build(program)))


def check_pairing(program):
    raise_found(message_faults(build(program)))


def check_deadlock(program, *, blocking_sends=False):
    raise_found(deadlock_problems(build(program), blocking_sends=blocking_sends))


def survives_blocking_sends(program):
    return not any(deadlock_problems(build(program), blocking_sends=True))


def verdict(check, program, **how):
    """The error of a check, None if it passes."""
    try:
        check(program, **how)
    except ZbcError as error:
        return error
    return None
