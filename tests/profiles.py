"""Profiles with round numbers, as `zbc profile` would write them for the jobs of tests/jobs.py."""

from typing import Any

from zbc.job.profile import Host, LayerBytes, LayerProfile, LinkProfile, Measured, Origin, Profile, model_of
from zbc.job.spec import Job


def layer(f: float, b: float, w: float, *, sized: bool = True, **more: Any) -> LayerProfile:
    times = {key: Measured(ms=ms) for key, ms in more.items() if key != "bytes"}
    held = more.get("bytes") or (nbytes() if sized else None)
    return LayerProfile(f=Measured(ms=f), b=Measured(ms=b), w=Measured(ms=w), parameters=100, bytes=held, **times)


def nbytes(**changes: Any) -> LayerBytes:
    usual = {"input": 1000, "output": 1000, "kept_b": 5000, "kept_w": 3000, "keeps_input": True, "keeps_output": False}
    state = {"weights": 400, "gradients": 400, "masters": 0, "optimizer": 800, "largest": 50}
    return LayerBytes(**{**usual, **state, **changes})


def profile_of(job: Job, **changes: Any) -> Profile:
    """F = 1, B = 2, W = 3 ms per block, 0.5 of each for embedding and head, transfers of 1 ms + 1 ms per MB."""
    kinds = {"embed": layer(0.5, 0.5, 0.5), "block": layer(1.0, 2.0, 3.0), "head": layer(0.5, 0.5, 0.5)}
    usual: dict[str, Any] = {
        "on": Origin(device="cpu", name="a processor", torch="2.13.0"),
        "model": model_of(job.model),
        "microbatch_size": job.schedule.microbatch_size,
        "optimizer": job.optimizer.name,
        "layers": kinds if job.model.builtin else {"Layer": layer(1.0, 2.0, 3.0)},
        "order": list(kinds) if job.model.builtin else ["Layer"] * job.model.layers,
        "link": LinkProfile(latency_us=1000.0, gbps=1.0),
        "host": Host(),
    }
    return Profile(**{**usual, **changes})
