"""Images and compose file as far as they can be checked without a Docker daemon."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from rstar2_megatron.judge.__main__ import command_line
from rstar2_megatron.services.redis_server import find_redis_server
from tests.e2e.runs import ROOT
from tests.imports import imports

DOCKER = ROOT / "docker"
PACKAGE = ROOT / "rstar2_megatron"
# name of the package on the index -> name that is imported, where they differ
IMPORTED = {"prometheus-client": "prometheus_client"}


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def services(composed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return composed["services"]


@pytest.mark.parametrize("name", ["judge.Dockerfile", "train.Dockerfile"])
def test_what_an_image_copies_and_starts_exists(name: str) -> None:
    lines = instructions(name)
    copied = [word for key, words in lines if key == "COPY" for word in words.split()[:-1]]
    assert copied and [path for path in copied if not (ROOT / path).exists()] == []
    ((_, entry),) = [line for line in lines if line[0] == "ENTRYPOINT"]
    program = json.loads(entry)[-1]
    assert (ROOT / program).exists() or (ROOT / program.replace(".", "/") / "__main__.py").exists()
    (image,) = [words for key, words in lines if key == "FROM"]
    assert ":" in image and not image.endswith(":latest")


def test_the_training_image_is_set_up_by_the_projects_own_script() -> None:
    """Its steps are those that scripts/try_gpu_install.sh runs; cuDNN is the lock's alone; compilers and headers are there."""
    lines = instructions("train.Dockerfile")
    (image,) = [words for key, words in lines if key == "FROM"]
    assert image.startswith("python:3.11") and "slim" not in image  # Python.h, git; not nvidia/cuda with a second cuDNN
    runs = [words for key, words in lines if key == "RUN"]
    assert "bash scripts/setup_env.sh" in runs and not any("pip install" in words for words in runs)
    assert any("build-essential" in words for words in runs)
    assert any("RSTAR2_GPU=1" in words for key, words in lines if key == "ENV")
    copied = [
        word
        for key, words in lines[: lines.index(("RUN", "bash scripts/setup_env.sh"))]
        if key == "COPY"
        for word in words.split()
    ]
    assert {"requirements", "scripts", "rstar2_megatron", "pyproject.toml"} <= set(copied)


def test_the_checkouts_own_environment_stays_out_of_the_images() -> None:
    """What git ignores (.venv, caches, results) is made by the machine it lies on."""

    def patterns(name: str) -> set[str]:
        lines = (ROOT / name).read_text().splitlines()
        return {line.removeprefix("**/").strip("/") for line in lines if line and not line.startswith("#")}

    assert patterns(".gitignore") - {"*.pyc"} <= patterns(".dockerignore")
    # and nothing that an image copies by name
    assert not {"rstar2_megatron", "requirements", "scripts", "docker", "config"} & patterns(".dockerignore")


def test_services_build_and_reach_each_other(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if "build" in service:
            context = DOCKER / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file(), name
        assert set(service.get("depends_on", {})) <= set(services)
        for other, condition in service.get("depends_on", {}).items():
            assert condition["condition"] != "service_healthy" or "healthcheck" in services[other]
        # a service of another network mode does not know the names of this file
        on_network = "network_mode" not in service
        named = set(re.findall(r"@(\w+):6379", json.dumps(service.get("environment", {}))))
        assert named == ({"redis"} if name in ("judge", "worker") else set()) and (on_network or not named), name
        assert "JUDGE_TOKEN" not in json.dumps(service.get("command", [])), name  # ps shows it to every account
    assert {name for name, service in services.items() if "network_mode" in service} == {"train-host"}
    assert not any(services[name].get("profiles") for name in ("redis", "judge", "worker"))


def test_redis_asks_for_the_token(composed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "redis.conf").write_text(
        composed["configs"]["redis"]["content"].replace("${JUDGE_TOKEN:?set JUDGE_TOKEN}", "token")
    )
    socket = tmp_path / "redis.sock"
    command = [find_redis_server(), "redis.conf", "--port", "0", "--unixsocket", str(socket)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None and not socket.exists():
                time.sleep(0.02)
            with redis.Redis(unix_socket_path=str(socket)) as client, pytest.raises(redis.AuthenticationError):
                client.ping()
            with redis.Redis(unix_socket_path=str(socket), password="token") as client:
                assert (client.config_get("save"), client.config_get("appendonly")) == ({"save": ""}, {"appendonly": "yes"})
        finally:
            server.terminate()


@pytest.mark.parametrize("name", ["judge", "worker"])
def test_the_judge_understands_its_commands(services: dict[str, dict[str, Any]], name: str) -> None:
    parsed = command_line().parse_args(services[name]["command"])
    assert parsed.command == {"judge": "serve", "worker": "worker"}[name]
    port = services["judge"]["ports"][0].rpartition(":")[2]
    assert parsed.port == (int(port) if name == "judge" else 0)
    assert f":{port}/ready" in services["judge"]["healthcheck"]["test"][-1]
    ast.parse(services["judge"]["healthcheck"]["test"][-1])
    (default,) = [words for key, words in instructions("judge.Dockerfile") if key == "CMD"]
    assert command_line().parse_args(json.loads(default)).command == "all"


def test_the_judges_image_holds_all_that_it_imports() -> None:
    files = (ROOT / "requirements" / "judge.txt", ROOT / "requirements" / "programs.txt")
    lines = [line for file in files for line in file.read_text().splitlines()]
    names = [re.split(r"[\[=<>]", line)[0] for line in lines if line and not line.startswith("#")]
    pins = (ROOT / "requirements" / "constraints.txt").read_text().lower().replace("_", "-")
    assert [name for name in names if f"\n{name}==" not in pins] == []

    waiting = [*sorted((PACKAGE / "judge").rglob("*.py")), PACKAGE / "reward" / "worker.py"]
    seen: set[Path] = set()
    needed: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports(path):
            place = ROOT.joinpath(*module.split("."))
            if module.startswith("rstar2_megatron"):
                waiting += [f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()]
            elif module.partition(".")[0] not in sys.stdlib_module_names:
                needed.add(module.partition(".")[0])
    assert {"redis", "sympy"} <= needed
    assert needed <= {IMPORTED.get(name, name) for name in names}
