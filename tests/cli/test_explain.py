"""Every code that zbc raises has a long text, and every text a code."""

import re
from pathlib import Path

import pytest

import zbc as package
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.explain import CATALOGUE, FAMILIES, glossary

ROOT = Path(package.__file__).parent
EXPLAIN = ROOT / "explain"
SOURCES = ROOT.glob("**/*.py")


def test_the_catalogue_has_the_codes_that_are_raised_each_once_with_its_family():
    raised = {code for path in SOURCES for code in re.findall(r"\bE\d{3}\b", path.read_text())}
    assert len(raised) > 40
    assert raised == set(CATALOGUE)
    # A file of another family could otherwise hide it, by replacing the section.
    found = [re.findall(r"^## (E\d{3}) ", path.read_text(), re.MULTILINE) for path in sorted(EXPLAIN.glob("E*.md"))]
    assert [code for codes in found for code in codes] == list(CATALOGUE)
    assert all(len({code[1] for code in codes}) == 1 for codes in found)


@pytest.mark.parametrize("code", few(CATALOGUE, lambda code: code.endswith("1")))
def test_each_code_is_explained_in_words_that_fit_a_terminal(code, zbc):
    ran = zbc("explain", code.lower())
    assert ran.code == 0
    entry = CATALOGUE[code]
    assert ran.out.startswith(f"{code}: {entry.title}\n{FAMILIES[code[1]]}\n")
    assert len(entry.text) > 60
    assert max(map(len, ran.out.split("\n"))) <= 80


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_names_the_exit_code_its_errors_have(family):
    number = re.search(r"exit code (\d)", FAMILIES[family])[1]
    assert ZbcError(f"E{family}01", "x").exit_code == int(number)


def test_without_a_code_all_are_listed(zbc):
    out = zbc("explain").out
    codes, _, words = out.partition("\n\n")
    assert [line.split()[0] for line in codes.split("\n")[1:]] == list(CATALOGUE)
    assert "shared vocabulary" in " ".join(words.split())


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (("unshard",), "GATHER"),
        (("chunked", "pipeline"), "slices"),
        (("Context-Parallel",), "cp"),
        (("ZeRO",), 'shard = "optimizer"'),
        (("early", "stopping"), "early stopping"),
        (("LoRA",), "adapters"),
        (("DualPipe",), "two pipes"),
        (("virtual_stages",), "chunks"),
    ],
)
def test_words_of_the_field_are_found_however_they_are_written(zbc, said, known):
    assert zbc("explain", *said).out.splitlines()[0] == known
    assert zbc("explain", *said, "--json").json()["names"][0] == known


def test_words_have_one_meaning():
    names = [glossary._plain(name) for word in glossary.WORDS for name in word.names]
    assert len(names) == len(set(names))


def test_a_key_of_a_job_is_explained_with_and_without_its_table(zbc):
    told = zbc("explain", "parallel.cp").out
    assert told.startswith("parallel.cp\n") and "Default: 1." in told
    assert zbc("explain", "heads").out.startswith("model.heads\n")
    told = zbc("explain", "dtype").out
    assert told.startswith("model.dtype\n") and "data.dtype: " in " ".join(told.split())


@pytest.mark.parametrize(("word", "without"), [("ep", "replicas"), ("tp", "http"), ("cp", "ncp")])
def test_limits_of_a_short_word_are_of_that_word(zbc, word, without):
    rows = zbc("explain", "limits", word, "--json").json()["limits"]
    assert rows and all(re.search(rf"\b{word}\b", f"{row['one']} {row['other']}") for row in rows)
    assert not any(without in f"{row['one']} {row['other']}" for row in rows)
