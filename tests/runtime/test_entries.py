"""Samples that are dicts or dataclasses: their entries go to the layers and the loss that name them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.jobs import job
from tests.refusals import refused
from tests.runtime.small_plans import parameters
from tests.runtime.zoo import LINEAR, layer, layer_of
from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.training.building.context import Settings, layer_plans
from zbc.training.data.data import Batches, build_samples, input_spec
from zbc.training.probing.checkup import plain_gradients
from zbc.training.probing.shapes import derive

M, SIZE, WIDTH = 4, 2, 8


Layer = layer_of(lambda m, x: m.linear(x), linear=lambda out=WIDTH: nn.Linear(WIDTH, out))


@layer(linear=LINEAR)
def In(self, image: Tensor, scale: Tensor | None = None) -> Tensor:
    y = self.linear(image)
    return y if scale is None else y * scale[:, None]


@layer(linear=LINEAR)
def Mid(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.linear(x).tanh()
    return y if mask is None else y * mask


Free = layer_of(lambda m, x, **others: m.linear(x) + others["image"] + others["kind"][:, None])
Told = layer_of(lambda m, x, target: m.linear(x) + target.roll(1, -1))  # knows the target, as a decoder does
Two = layer_of(lambda m, x: {"boxes": m.boxes(x), "kind": m.kind(x)}, boxes=lambda: Layer(4), kind=lambda: Layer(3))


def layers(of: list[str]) -> list[Any]:
    return [globals()[name] for name in of]


@dataclass
class Item:
    image: Tensor
    scale: float
    target: Tensor


def drawn(index: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(index)
    found = {name: torch.randn(WIDTH, generator=made) for name in ("image", "target", "boxes", "mask")}
    found |= {"boxes": found["boxes"][:4], "mask": found["mask"] > 0, "scale": 1.0 + index % 3}
    return found | {"kind": -100 if index % 3 == 0 else index % 3, "importance": 0.5 + index % 2}


class Items:
    """64 samples: some entries as a dict, as the halves of a pair or of a nested dict, or as a dataclass."""

    def __init__(self, form: str, x: Any, target: Any = ()) -> None:
        self.form, self.x, self.target = form, x, target

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        every = drawn(index)
        x, target = (
            every[names] if isinstance(names, str) else {name: every[name] for name in names}
            for names in (self.x, self.target)
        )
        if self.form == "unlike" and index % 2:
            x["mask"] = every["mask"]
        forms = {"pair": (x, target), "nested": {"input": x, "target": target}}
        return Item(**x) if self.form == "dataclass" else forms.get(self.form, x)


def both(output: dict[str, Tensor], boxes: Tensor, kind: Tensor) -> Tensor:
    return functional.mse_loss(output["boxes"], boxes) + functional.cross_entropy(output["kind"], kind.abs() % 3)


def weighted(output: Tensor, target: Tensor, importance: Tensor) -> Tensor:
    return ((output - target).square().mean(1) * importance).mean()


def masked(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((output - target) * mask).square().mean()


def free(output: Tensor, **others: Tensor) -> Tensor:
    return functional.mse_loss(output, others["target"])


def counted(output: dict[str, Tensor], kind: Tensor, boxes: Tensor) -> Tensor:
    return functional.cross_entropy(output["kind"], kind, reduction="sum") / (kind != -100).sum().clamp(min=1)


counted.count = lambda kind: int((kind != -100).sum())
in_c = torch.dist

SHORT, TWO, FREE = (["In", "Mid", *rest] for rest in (["Mid", "Layer"], ["Mid", "Two"], ["Free", "Layer"]))
FIRST, AGAIN = ["In", "Layer", "Layer", "Layer"], {"memory": {"activations": "recompute"}}
CASES = {
    "the first layer's two": (("dict", ["image", "scale", "target"]), FIRST, "mse", "1f1b", {}),
    "a mask for later layers": (("dict", ["image", "mask", "target"]), SHORT, "mse", "zb-h1", {}),
    "all of it": (("dict", ["image", "scale", "mask", "target"]), SHORT, "mse", "zb-v", {}),
    "a dataclass": (("dataclass", ["image", "scale", "target"]), FIRST, "mse", "1f1b", {}),
    "of a layer and the loss": (("dict", ["image", "target"]), ["In", "Told", "Mid", "Layer"], "mse", "zb-h1", {}),
    "layers and a loss that take any": (("dict", ["image", "kind", "target"]), FREE, "free", "1f1b", {}),
    "a pair with entries": (("pair", ["image", "scale"], "target"), SHORT, "mse", "interleaved", {}),
    "several targets": (("dict", ["image", "boxes", "kind"]), TWO, "both", "zb-h1", {}),
    "a pair with several": (("pair", "image", ["kind", "boxes"]), ["Layer", *TWO[1:]], "both", "1f1b", {}),
    "both halves nested": (("nested", ["image", "mask"], ["boxes", "kind"]), TWO, "both", "gpipe", {}),
    "weights for the loss": (("dict", ["image", "target", "importance"]), SHORT, "weighted", "zb-h1", AGAIN),
    "an input's for the loss": (("pair", ["image", "mask"], "target"), SHORT, "masked", "1f1b", {}),
    "targets that are counted": (("dict", ["image", "kind", "boxes"]), TWO, "counted", "1f1b", {}),
}


def plan_of(form: Any, names: list[str], loss: str, kind: str, more: dict[str, Any], **kept: float) -> StoredPlan:
    more = dict(more)
    name = loss if loss in ("mse", "cross_entropy") else f"{__name__}:{loss}"
    model = {"family": f"{__name__}:layers", "layers": len(names), "loss": name, "args": {"of": names}}
    data = {"kind": f"{__name__}:Items", "args": dict(zip(("form", "x", "target"), form, strict=False)), **kept}
    schedule = {"kind": kind, "microbatches": M, "microbatch_size": SIZE, "slices": more.pop("slices", 1)}
    model |= {"seq_len": WIDTH} if schedule["slices"] > 1 else {}
    compiled = compile_job(job(model=model, data=data, parallel={"pp": 2}, schedule=schedule, **more))
    ranks = tuple(tuple(op for op in ops if op.kind is not Kind.STEP) for ops in compiled.program.ranks)
    return StoredPlan(compiled.assemble()[0], replace(compiled.program, ranks=ranks))


def by_torch(settings: Settings, form: Any, names: list[str], loss: str, taken: list[int]) -> Tensor:
    """The loss of some samples at once, written out."""
    b = {name: torch.stack([torch.as_tensor(drawn(i)[name]) for i in taken]) for name in drawn(0)}
    modules = [one.build(settings.train.seed) for one in layer_plans(settings)]
    given = {"In": ["scale"], "Mid": ["mask"], "Told": ["target"], "Free": ["image", "kind"]}
    y: Any = b["image"]
    for name, module in zip(names, modules, strict=True):
        y = module(y, **{entry: b[entry] for entry in given.get(name, []) if entry in str(form)})
    takes = {"both": ["boxes", "kind"], "weighted": ["target", "importance"], "masked": ["target", "mask"]}
    takes |= {"counted": ["kind", "boxes"]}
    value = (
        functional.mse_loss(y, b["target"]) if loss in ("mse", "free") else globals()[loss](y, *map(b.get, takes[loss]))
    )
    by_torch.grads = {f"layers.{i}.{n}": p for i, m in enumerate(modules) for n, p in m.named_parameters()}
    return value


@pytest.mark.long("all of it", "a mask for later layers", "layers and a loss that take any")
@pytest.mark.parametrize("case", CASES)
def test_entries_give_the_loss_and_gradients_of_plain_torch(case):
    form, names, loss, kind, more = CASES[case]
    plan = plan_of(form, names, loss, kind, {**more, "train": {"steps": 1, "eval_every": 1}}, validation=0.25)
    workers, settings = run_threads(plan, 1), Settings.of(plan.manifest)
    found = {name: p.grad for name, p in parameters(workers).items()}
    samples = build_samples(settings.data, settings.model, settings.train.seed)
    order = Batches(samples, seed=settings.train.seed, microbatches=M, size=SIZE)
    value = by_torch(settings, form, names, loss, [index for mb in range(M) for index in order.numbers(0, mb)])
    value.backward()
    checked, gradients = plain_gradients(plan)  # of `zbc check --gradients`
    assert workers[0].results[0].loss == pytest.approx(value.item(), rel=1e-6) == checked
    assert found.keys() == by_torch.grads.keys() == gradients.keys()
    for name, parameter in by_torch.grads.items():
        for grad in (found[name], gradients[name]) if parameter.grad is not None else ():
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    kept = by_torch(settings, form, names, loss, [*range(48, 64)]).item()
    assert workers[0].evaluation.results[0].loss == pytest.approx(kept, rel=1e-6)


def test_entries_that_no_later_layer_names_go_no_further():
    manifest = plan_of(*CASES["the first layer's two"]).manifest
    settings = Settings.of(manifest)
    samples = build_samples(settings.data, settings.model, 0)
    spec = input_spec(settings.data, settings.model, samples, SIZE)
    found = derive(layer_plans(settings), lambda _: spec, manifest, ends=frozenset({"target"}), autocast=None)
    assert found.stages[0].came.alongside == ["image", "scale"]  # the target is read where the loss is
    assert found.stages[1].came is None and found.stages[0].gives.shape == (SIZE, WIDTH)


@pytest.mark.parametrize(
    ("form", "loss", "why"),
    [
        (("dict", ["image", "importance", "target"]), "mse", "have importance, which no parameter"),
        (("dict", ["image", "mask"]), "mse", "model.loss takes target or targets or label"),
        (("dict", ["image", "target"]), "weighted", "model.loss takes importance"),
        (("pair", "image", ["boxes", "kind", "mask"]), "both", "a target called mask"),
        (("dict", ["scale", "target"]), "mse", "layer layers.0 cannot take"),
        (("unlike", ["image", "target"]), "mse", "the input of sample"),
    ],
)
def test_entries_that_nothing_takes_or_that_are_missing_are_refused(form, loss, why):
    with refused("E505", why):
        run_threads(plan_of(form, SHORT, loss, "1f1b", {}), 1)


@pytest.mark.long
def test_slices_take_pairs():
    form, names, loss, _, _ = CASES["a mask for later layers"]
    with refused("E110", "have entries called image, mask, target"):
        run_threads(plan_of(form, names, loss, "1f1b", {"slices": 2}), 1)


def test_a_loss_in_c_takes_the_usual_target():
    worker = run_threads(plan_of(("dict", ["image", "target"]), SHORT, "in_c", "1f1b", {}), 1)[-1]
    assert worker.results[0].loss > 0
