"""The surface is a budget: commands, options, keys of a job file and codes of errors are counted, and may only fall."""

import re
import shlex

import pytest
import typer

from tests.refusals import refused
from zbc import explain as errors
from zbc.cli import app, main
from zbc.commands import retired
from zbc.job.spec import SECTIONS, drafted, gathered, json_schema
from zbc.job.spellings import OLD
from zbc.job.toml import loads
from zbc.job.wording import RETIRED, RETIRED_VALUES

GLOBAL = {"--json", "--quiet", "--verbose"}  # of every command


def leaves(command, *names):
    """(words to type, command) of all commands below one."""
    below = getattr(command, "commands", None)
    return [(names, command)] if below is None else [one for name in below for one in leaves(below[name], *names, name)]


COMMANDS = dict(leaves(typer.main.get_command(app)))
OPTIONS = [
    max(option.opts, key=len) for command in COMMANDS.values() for option in command.params if option.opts[0][0] == "-"
]


def keys(schema, whole):
    """The number of keys a schema has, those of its tables among them."""
    schema = whole["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    below = [keys(part, whole) for part in schema.get("properties", {}).values()]
    return sum(below) or max([keys(part, whole) for part in schema.get("anyOf", [])], default=1)


COUNTED = {
    "commands": (len(COMMANDS), 13),
    "options": (len({*OPTIONS}), 46),
    "places of options": (len([option for option in OPTIONS if option not in GLOBAL]), 95),
    "keys": (keys(json_schema(), json_schema()), 150),
    "codes": (len(errors.CATALOGUE), 65),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_surface_never_grows(name):
    """Who adds one takes one away, and lowers the bound to what is counted."""
    assert COUNTED[name][0] <= COUNTED[name][1]


GONE = [*retired.COMMANDS, *((name, option) for option, (names, _) in retired.OPTIONS.items() for name in names)]


@pytest.mark.parametrize("words", GONE, ids=" ".join)
def test_what_is_gone_says_in_one_line_what_to_type(words, capsys):
    """That is a command of today with options that it has."""
    with pytest.raises(SystemExit) as left:
        main([*words, "a b.toml"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and "is gone; type: " in said
    typed = shlex.split(said.partition("type: ")[2].partition(":")[0].partition(",")[0])
    command = (typed[1],) if typed[0] == "zbc" else words[:1]
    known = {option for param in COMMANDS[command].params for option in param.opts}
    assert {word for word in typed if word.startswith("-")} <= known
    assert words not in COMMANDS and (typed[0] == "zbc" or not {*words[1:]} & known)
    assert "{}" not in str(retired.COMMANDS.get(words)) or "'a b.toml'" in said


@pytest.mark.parametrize(
    ("option", "command"), [(option, name) for option, (names, _) in retired.READ.items() for name in names]
)
def test_an_old_option_is_read_as_that_of_today_and_says_it(option, command, capsys):
    """With its value behind it or after an equals sign; an option that became the argument is left out."""
    new = retired.READ[option][1]
    known = {option for param in COMMANDS[(command,)].params for option in param.opts}
    assert option not in known and (not new or new in known)
    for words in ([option, "value"], [f"{option}=value"]):
        read, (line,) = retired.read([command, *words])
        assert " ".join(read).replace("=", " ").split() == [command, *([new] if new else []), "value"]
        assert line.startswith(f"`{option}` of `zbc {command}` is an old spelling; type: {new}")
    with pytest.raises(SystemExit):
        main([command, option, "value", "--help"])
    assert "is an old spelling" in capsys.readouterr().err


@pytest.mark.parametrize("code", errors.GONE)
def test_a_code_that_is_gone_names_the_one_that_stands_for_it(code, capsys):
    with pytest.raises(SystemExit):
        main(["explain", code])
    said = capsys.readouterr().out
    assert code not in errors.CATALOGUE and said.split()[2] in errors.CATALOGUE
    assert said.count("\n") == 1 and said.startswith(f"{code} is E")


@pytest.mark.parametrize(("key", "value"), RETIRED_VALUES)
def test_a_value_that_is_gone_says_what_to_write(key, value):
    table, _, name = key.rpartition(".")
    problems = drafted(loads(f'[{table}]\n{name} = "{value}"\n', "zbc.toml")).problems
    assert any(f'{value}" is gone; write {RETIRED_VALUES[key, value]}' in str(error) for error in problems)


@pytest.mark.parametrize("key", RETIRED)
def test_a_key_that_is_gone_says_what_to_write(key, capsys):
    with pytest.raises(SystemExit):
        main(["explain", key])
    assert "gone; write" in capsys.readouterr().out
    table, _, name = key.rpartition(".")
    text = (f"[{table}]\n" if table else "") + f"{name} = 1\n"
    problems = [str(error) for error in drafted(loads(text, "zbc.toml")).problems]
    assert any(f"{key} is gone; write {RETIRED[key]}" in problem for problem in problems)
    named = re.findall(r"(\w+)\.(\w+)", RETIRED[key])
    assert all(name in SECTIONS[table].model_fields for table, name in named)


SAID = {  # old key: what a file may have said, and where it is now
    "optimizer.zero1": ("true", "parallel", "shard", "optimizer"),
    "schedule.file": ('"a.csv"', "schedule", "kind", "a.csv"),
    "schedule.plugin": ('"a:b"', "schedule", "kind", "a:b"),
    "schedule.tokens_per_microbatch": ("32", "schedule", "microbatch_size", 2),
    "train.nonfinite": ('"stop"', "train", "skip_limit", 1),
    "partition.layout": ('"Et|tL"', "partition", "layers_per_stage", "Et|tL"),
    "model.positions": ('"rotary"', "model", "variant", "rotary"),
    "model.activation": ('"gelu_tanh"', "model", "variant", "gpt2"),
    "model.tie_embeddings": ("true", "model", "ties", True),
    "model.norm_top_k": ("false", "model", "router", "softmax of all"),
    "model.expert_hidden": ("8", "model", "ffn_hidden", 8),
    "model.shared_hidden": ("8", "model", "ffn_hidden", [8]),
    "model.node_limit": ("2", "model", "expert_groups", [2]),
    "model.balance_rate": ("0.1", "model", "balance_loss", [0.0, 0.1]),
    "model.router_z_loss": ("0.1", "model", "z_loss", [0.0, 0.1]),
    "model.loss_scale_steps": ("3", "model", "loss_scale", [65536.0, 3]),
    "model.master": ("false", "model", "parameters", "bfloat16 alone"),
    "model.matmul": ('"fp8"', "model", "dtype", "fp8"),
    "freeze.after": ("3", "freeze", "most", [0.0, 3]),
    "model.groups": ("{ a = 2 }", "model", "graph", {"a": [2]}),
}


@pytest.mark.parametrize("old", SAID)
def test_an_old_spelling_is_read_as_the_key_of_today_and_says_it(old, tmp_path, caplog):
    """The command line stands above the file, whichever is old; two answers at one place are refused."""
    (table, _, name), (text, other, key, value) = old.partition("."), SAID[old]
    path, line = tmp_path / "zbc.toml", "[model]\nseq_len = 16\n{}{} = {}\n".format
    path.write_text(line(f"[{table}]\n" * (table != "model"), name, text))
    document = gathered(path)
    assert document.values[other][key] == value and name not in document.values[table]
    assert (where := document.where((other, key))) == f"{path}:{3 + (table != 'model')}:{len(name) + 4}"
    assert caplog.messages == [f"config: {where}: {old} is an old spelling; write {OLD[old][1]}"]
    assert name not in SECTIONS[table].model_fields
    if callable(OLD[old][2]):  # joined with what the key of today says
        return
    assert gathered(path, [f"{other}.{key}=1"]).values[other][key] == 1
    path.write_text(line(f"[{other}]\n" * (other != "model"), key, 7))
    assert gathered(path, [f"{old}={text}"]).values[other][key] == value
    with refused("E110", "two answers to one question"):
        gathered(path, [f"{old}={text}", f"{other}.{key}=9"])


def test_a_rate_of_its_own_for_adamw_is_read_as_the_second_of_two(tmp_path, caplog):
    """Beside that of the matrices, whichever of both the command line sets; and files may say their version."""
    path = tmp_path / "zbc.toml"
    path.write_text('zbc = 1\n[optimizer]\nkind = "muon"\nadamw_lr = 0.01\n')
    assert gathered(path).values == {"optimizer": {"kind": "muon", "lr": [3e-4, 0.01]}}
    assert caplog.messages == [
        f"config: {path}:4:12: optimizer.adamw_lr is an old spelling; write {OLD['optimizer.adamw_lr'][1]}"
    ]
    assert gathered(path, ["optimizer.lr=0.1"]).values["optimizer"]["lr"] == [0.1, 0.01]
    assert gathered(path, ["optimizer.adamw_lr=0.2"]).values["optimizer"]["lr"] == [3e-4, 0.2]
    assert {*OLD} == {*SAID, "optimizer.adamw_lr"}
    path.write_text("zbc = 2\n")
    assert "zbc is gone; write nothing" in str(drafted(gathered(path)).problems[0])
