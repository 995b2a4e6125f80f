"""Code named in a YAML: found, shipped as text, loaded, blamed."""

from __future__ import annotations

import pickle
import site
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from rstar2_megatron.extension.choice import own_function
from rstar2_megatron.extension.user_code import FOLDERS, UserCode, UserCodeError, all_user_code

SCORE = """
import weighing

def score(x):
    return weighing.weigh(x)

def _hidden(): ...
"""


class Section(BaseModel):
    function: UserCode | None = None
    several: list[UserCode] = []


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def read(reference: str, *folders: Path) -> UserCode:
    return UserCode.model_validate(reference, context={FOLDERS: list(folders)})


def refusal(reference: str, *folders: Path) -> str:
    with pytest.raises(ValidationError) as refused:
        read(reference, *folders)
    return str(refused.value.errors()[0]["msg"])


def test_a_path_counts_from_the_first_folder_that_has_it(tmp_path: Path) -> None:
    write(tmp_path / "yaml", "a.py", "def f(): return 'beside the YAML'")
    write(tmp_path / "user", "a.py", "def f(): return 'where the user stands'")
    write(tmp_path / "user", "b.py", "def f(): return 'b'")
    folders = tmp_path / "yaml", tmp_path / "user"
    assert read("a.py:f", *folders).load()() == "beside the YAML"
    assert read("b.py:f", *folders).load()() == "b"
    assert read(f"{tmp_path}/user/a.py:f", *folders).load()() == "where the user stands"


def test_it_runs_from_its_text_where_no_file_is(tmp_path: Path) -> None:
    """Pickled, the files deleted, loaded in another process: modules beside it are there, and `__file__` is as it was."""
    write(tmp_path, "grading_a.py", SCORE + "\nHERE = __file__\n")
    write(tmp_path, "weighing.py", "from constants_a import TWO\ndef weigh(x): return TWO * x\n")
    write(tmp_path, "constants_a.py", "TWO = 2\n")
    write(tmp_path, "unrelated.py", "raise SystemExit('nobody imports this')")
    data = pickle.dumps([read("grading_a.py:score", tmp_path), read("grading_a.py:HERE", tmp_path)])
    for path in tmp_path.glob("*.py"):
        path.unlink()
    program = "import pickle, sys; score, here = pickle.load(sys.stdin.buffer); print(score.load()(21), here.load())"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.stdout.decode().split() == ["42", f"{tmp_path}/grading_a.py"], done.stderr


def test_a_package_beside_it_goes_with_it(tmp_path: Path) -> None:
    """All its files, relative imports and its own folders included, also into the run's copy."""
    lines = "from helpers_p.deep import weights", "import helpers_p", "def score(x): return helpers_p.weigh(x) + weights.ONE"
    write(tmp_path, "grading_p.py", "\n".join(lines))
    write(tmp_path / "helpers_p", "__init__.py", "from .scale import weigh\n")
    write(tmp_path / "helpers_p", "scale.py", "from constants_p import TWO\ndef weigh(x): return TWO * x\n")
    write(tmp_path / "helpers_p" / "deep", "__init__.py", "")
    write(tmp_path / "helpers_p" / "deep", "weights.py", "from ..scale import TWO\nONE = TWO - 1\n")
    write(tmp_path, "constants_p.py", "TWO = 2\n")
    code = read("grading_p.py:score", tmp_path)
    code.save(tmp_path / "run")
    plain, data = code.model_dump(mode="json"), pickle.dumps(code)
    for path in [*tmp_path.glob("*.py"), *(tmp_path / "helpers_p").rglob("*.py")]:
        path.unlink()
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).load()(20))"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.stdout == b"41\n", done.stderr
    again = UserCode.model_validate(plain, context={FOLDERS: [tmp_path / "run"]})
    assert again.sha256 == code.sha256 and again.load()(20) == 41


def test_code_runs_once_a_process(tmp_path: Path) -> None:
    write(
        tmp_path,
        "once.py",
        "from pathlib import Path\nPath(__file__).with_suffix('.ran').open('a').write('x')\na = b = object()",
    )
    assert read("once.py:a", tmp_path).load() is read("once.py:b", tmp_path).load()
    assert (tmp_path / "once.ran").read_text() == "x"


def test_files_that_import_each_other_are_one_module_each(tmp_path: Path) -> None:
    """As in Python: state is shared, also by two entries of a YAML, and circles that Python can import are imported."""
    write(tmp_path, "store_a.py", "STORE = {}\ndef put(x): STORE[x] = 1\n")
    write(tmp_path, "more_a.py", "from store_a import STORE\ndef count(): return len(STORE)\n")
    put, count = (read(name, tmp_path).load() for name in ("store_a.py:put", "more_a.py:count"))
    put("x")
    assert count() == 1
    write(tmp_path, "circle_a.py", "import circle_b\ndef helper(): return 2\ndef f(): return circle_b.g()\n")
    write(tmp_path, "circle_b.py", "import circle_a\ndef g(): return circle_a.helper()\n")
    assert read("circle_a.py:f", tmp_path).load()() == 2
    write(tmp_path, "more_a.py", "from store_a import STORE\ndef count(): return -1\n")
    assert read("more_a.py:count", tmp_path).load()() == -1  # mended, and loaded again
    write(tmp_path / "other", "store_a.py", "def put(x): return 'of another folder'")
    assert read("store_a.py:put", tmp_path / "other").load()("x") == "of another folder"
    write(tmp_path, "random.py", "def f(): return 'not the standard one'")
    assert read("random.py:f", tmp_path).load()() == "not the standard one"


def test_a_saved_configuration_reads_its_copy(tmp_path: Path) -> None:
    """The file may change or go: what the run used is beside its configuration."""
    source = write(tmp_path / "user", "c.py", "def f(): return 1")
    write(tmp_path / "user", "beside_c.py", "")
    code = read("c.py:f", tmp_path / "user")
    plain = code.model_dump(mode="json")
    source.write_text("def f(): return 2")
    with pytest.raises(ValidationError, match=r"c\.py has changed since this configuration was saved"):
        UserCode.model_validate(plain, context={FOLDERS: [tmp_path / "run"]})
    code.save(tmp_path / "run")
    source.unlink()
    again = UserCode.model_validate(plain, context={FOLDERS: [tmp_path / "run"]})
    assert again.sha256 == code.sha256 and again.load()() == 1


def test_hash_changes_with_a_module_beside(tmp_path: Path) -> None:
    write(tmp_path, "d.py", "import beside_d\ndef f(): ...")
    write(tmp_path, "beside_d.py", "A = 1")
    before = read("d.py:f", tmp_path).sha256
    write(tmp_path, "other.py", "B = 1")
    assert read("d.py:f", tmp_path).sha256 == before
    write(tmp_path, "beside_d.py", "A = 2")
    assert read("d.py:f", tmp_path).sha256 != before


def test_an_installed_module_needs_no_file() -> None:
    code = UserCode.model_validate("json:dumps")
    assert code.load()([1]) == "[1]" and len(code.sha256) == 64


def test_another_version_of_a_package_on_a_node_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "installed_pkg.py", "def f(): ...")
    code = UserCode.model_validate("installed_pkg:f")
    write(tmp_path, "installed_pkg.py", "def f(): return 1")
    with pytest.raises(UserCodeError, match=r"differs between nodes .*install the same version everywhere"):
        code.load()


@pytest.mark.parametrize("reference", ["a.py", "a.py:", ":f", "a.py:not a name", ""])
def test_what_is_no_reference_is_refused(reference: str, tmp_path: Path) -> None:
    assert "neither path/to/file.py:name nor package.module:name" in refusal(reference, tmp_path)


def test_missing_files_names_and_modules_get_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "rewards.py", "import json\ndef score(): ...\ndef other(): ...")
    assert f"there is no file {tmp_path}/reward.py; did you mean rewards.py?" in refusal("reward.py:score", tmp_path)
    assert "no module 'no_such_module_at_all'" in refusal("no_such_module_at_all:f")
    with pytest.raises(UserCodeError, match=r"rewards.py has no 'scores'; did you mean score\?"):
        read("rewards.py:scores", tmp_path).load()
    with pytest.raises(UserCodeError, match="has no 'zzzz'; it has json, score, other"):
        read("rewards.py:zzzz", tmp_path).load()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise RuntimeError('no licence')", "pack_{}.mod cannot be imported: RuntimeError: no licence"),
        ("import sys; sys.exit(4)", "pack_{}.mod cannot be imported: SystemExit: 4"),
        ("import nothing_here_x", "pack_{}.mod cannot be imported: No module named 'nothing_here_x'"),
    ],
)
def test_a_package_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    name = f"{abs(hash(line)):x}"
    write(tmp_path / f"pack_{name}", "__init__.py", line)
    write(tmp_path / f"pack_{name}", "mod.py", "def score(): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said.format(name) in refusal(f"pack_{name}.mod:score")


def test_own_functions_get_their_arguments(tmp_path: Path) -> None:
    write(tmp_path, "scaled.py", "def f(rewards, valid, beta=1.0): return beta")
    code = UserCode.model_validate({"reference": "scaled.py:f", "arguments": {"beta": 0.5}}, context={FOLDERS: [tmp_path]})
    assert own_function("algorithm.adv_type", code, "rewards, valid")(0, 0) == 0.5
    assert UserCode.model_validate(code.model_dump(), context={FOLDERS: [tmp_path]}).arguments == {"beta": 0.5}
    assert read("scaled.py:f", tmp_path).model_dump().keys() == {"reference", "sha256"}
    code.arguments = {"gamma": 1}
    with pytest.raises(UserCodeError, match=r"called by \(rewards, valid, gamma=...\): got an unexpected keyword argument"):
        own_function("algorithm.adv_type", code, "rewards, valid")


def test_broken_code_is_told_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "broken.py", "x = 1\ndef f(:\n")
    assert f"{path}:2: invalid syntax" in refusal("broken.py:f", tmp_path)
    path = write(tmp_path, "failing.py", "def g():\n    return {}['key']\n\ng()\ndef f(): ...")
    with pytest.raises(UserCodeError, match=f"failing.py:f cannot be loaded: {path}:2, in g: KeyError: 'key'"):
        read("failing.py:f", tmp_path).load()
    write(tmp_path, "leaving.py", "raise SystemExit(3)")
    with pytest.raises(UserCodeError, match=r"leaving\.py:1: SystemExit: 3"):
        read("leaving.py:f", tmp_path).load()
    write(tmp_path, "lacking.py", "import no_such_module_at_all")
    with pytest.raises(UserCodeError, match="No module named 'no_such_module_at_all'"):
        read("lacking.py:f", tmp_path).load()


def test_a_module_beside_it_may_not_take_anothers_name(tmp_path: Path) -> None:
    write(tmp_path, "e.py", "import json\ndef f(): ...")
    write(tmp_path, "json.py", "")
    with pytest.raises(UserCodeError, match=r"json.py has the name of another module, .*json/__init__.py; rename it"):
        read("e.py:f", tmp_path).load()


def test_a_module_beside_it_may_not_hide_an_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has imported that yet: the project's own import would get the user's file."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
    write(tmp_path / "site", "installed_h.py", "")
    for number, name in enumerate(["this", "installed_h"]):
        write(tmp_path, f"hiding_{number}.py", f"import {name}\ndef f(): ...")
        write(tmp_path, f"{name}.py", "")
        with pytest.raises(UserCodeError, match=rf"{name}.py has the name of an installed package, {name}; rename it"):
            read(f"hiding_{number}.py:f", tmp_path).load()


@pytest.mark.parametrize("line", ["from .beside_r import TWO", "from . import beside_r"])
def test_a_relative_import_is_told_with_its_remedy(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "relative.py", f"import json\n{line}\ndef f(): ...")
    write(tmp_path, "beside_r.py", "TWO = 2")
    with pytest.raises(UserCodeError, match=rf"{path}:2: ImportError: .*; import what lies beside it by its name alone"):
        read("relative.py:f", tmp_path).load()


def test_a_folder_without_init_is_told_with_its_remedy(tmp_path: Path) -> None:
    write(tmp_path, "foldered.py", "from folder_n.scale import TWO\ndef f(): ...")
    write(tmp_path / "folder_n", "scale.py", "TWO = 2")
    write(tmp_path, "outputs.py", "import wandb_n\ndef f(): ...")
    (tmp_path / "wandb_n").mkdir()  # without a module, as a run's output
    assert read("outputs.py:f", tmp_path).name == "f"
    assert f"{tmp_path}/folder_n is imported and has no __init__.py; add an empty one" in refusal("foldered.py:f", tmp_path)


def test_a_byte_order_mark_is_no_code(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfdef f(): return 3\n")
    assert read("marked.py:f", tmp_path).load()() == 3


def test_blame_names_the_users_line_below_libraries(tmp_path: Path) -> None:
    path = write(tmp_path, "calls.py", "import json\n\ndef f():\n    return json.loads('{')\n")
    code = read("calls.py:f", tmp_path)
    with pytest.raises(ValueError) as failed:
        code.load()()
    said = code.blame(failed.value)
    assert said.startswith(f"{path}:4, in f: JSONDecodeError: Expecting property name")


def test_all_user_code_of_settings(tmp_path: Path) -> None:
    write(tmp_path, "x.py", "f = g = 1")
    section = Section.model_validate({"function": "x.py:f", "several": ["json:dumps", "x.py:g"]}, context={FOLDERS: [tmp_path]})
    assert [(key, code.label) for key, code in all_user_code(section)] == [
        ("function", "x.py:f"),
        ("several.0", "json:dumps"),
        ("several.1", "x.py:g"),
    ]
