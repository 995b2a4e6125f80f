"""The process of one engine: runs SGLang's Engine and serves its parent over an inherited socket.

`Engine.shutdown()` kills every child of the process that calls it, and a crashing scheduler kills its parent's process
tree. So each engine has its own process. That process ends when its parent ends: the socket closes, and a thread watches
the parent's process id while the engine starts.

`EngineChild` starts it as `python -m rstar2_megatron.rollout.engine.process SOCKET_FD PARENT_PID`. The first message on the
socket is {"server_args": {...}}.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from rstar2_megatron.rollout.engine import shared_files
from rstar2_megatron.rollout.engine.protocol import REPORT_ID, EngineReport, GenerateResult, read_message, write_message
from rstar2_megatron.services.process import free_port, kill_tree

# torch and SGLang are imported inside functions. The thread that watches the parent must start before they load, and the
# CPU stand-ins must be installed before SGLang is imported.

_REPORT_INTERVAL_S = 1.0
_PARENT_CHECK_S = 0.5
_EVERY_SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 8},
)
_TWO_TOKENS = {"max_new_tokens": 2, "ignore_eos": True}


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    from rstar2_megatron.cpu import sglang as shim

    shim.install()
    loop = asyncio.new_event_loop()  # before the engine, which uses the current event loop
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_EngineServer(connection).run())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    _end_tree(1)


def _end_tree(status: int) -> NoReturn:
    """Exit at once and kill every descendant. SGLang's shutdown waits and may hang on a broken scheduler."""
    kill_tree(os.getpid(), spare_root=True)
    os._exit(status)


def _create_engine(server_args: dict[str, Any], connection_fd: int) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    from rstar2_megatron.cpu import sglang as shim
    from rstar2_megatron.rollout.engine import scheduler_entry as engine_children

    if server_args.get("enable_deterministic_inference"):
        shim.allow_seeded_sampling()

    class TokenEngine(Engine):
        run_scheduler_process_func = staticmethod(engine_children.run_scheduler)

        @classmethod
        def _launch_scheduler_processes(cls, args: Any, port_args: Any, *rest: Any, **kwargs: Any) -> Any:
            """Fork the scheduler on a CPU: it inherits the loaded modules and starts 6 CPU seconds sooner."""
            port_args.instance_id = shared_files.instance_id(os.getpid())
            if server_args.get("device") == "cpu":
                engine_children.inherited_descriptor = connection_fd
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(args, port_args, *rest, **kwargs)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
            """Start no detokenizer: input and output are token ids. Saves 400 MB."""
            return [], []

    # SGLang's own choice is a port that the kernel may give to any connection meanwhile.
    return TokenEngine(**{"nccl_port": free_port(), **server_args})


class _EngineServer:
    """Serves `EngineClient` and `RewardEngine`: a request of `method` calls `do_method`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()
        # SGLang's RPC call blocks and serves one caller at a time
        self._rpc_thread = ThreadPoolExecutor(1, thread_name_prefix="rpc")

    async def run(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        start = await read_message(reader)
        self._server_args: dict[str, Any] = start[2]["server_args"]
        # blocks the loop; the parent sends nothing before the first report
        self._engine = _create_engine(self._server_args, self._connection.fileno())
        self._manager = self._engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        self._capacity = int(self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])
        await self._manager.get_loads()  # which opens the scheduler's file: now all of SGLang's are open
        shared_files.remove(os.getpid())
        if not self._server_args.get("is_embedding"):
            await self._warm_up()
        reporter = asyncio.create_task(self._report())
        try:
            while True:
                request_id, method, params = await read_message(reader)
                task = asyncio.create_task(self._answer(request_id, method, params))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            reporter.cancel()
            _end_tree(0)  # the parent closed the connection or is gone

    async def _warm_up(self) -> None:
        """Generate with each kind of sampling, before the first report.

        Kernels are compiled at their first use, which may take minutes. A start has a deadline for that; a request after it
        would count as an engine that makes no progress.
        """
        started = time.monotonic()
        for number, sampling in enumerate(_EVERY_SAMPLING):
            await self.do_generate({"input_ids": [0, 0], "sampling": {**sampling, **_TWO_TOKENS}, "rid": f"warm-up-{number}"})
        while not await self.do_flush_cache(None):  # refused until the last request has left the scheduler
            await asyncio.sleep(0.02)
        # Later collections leave out what is there now. On a CPU each flush, so each weight sync, waits for one: 0.4 s before.
        await self._manager.freeze_gc()
        seconds = time.monotonic() - started
        print(f"warm-up: {len(_EVERY_SAMPLING)} requests in {seconds:.1f} s", flush=True)

    async def _report(self) -> None:
        while True:
            loads = await self._manager.get_loads()  # read from shared memory
            report = EngineReport(
                progress=self._manager.last_receive_tstamp,
                max_total_tokens=self._capacity,
                used_tokens=loads[0].num_used_tokens if loads else 0,
                running_requests=loads[0].num_running_reqs if loads else 0,
                waiting_requests=loads[0].num_waiting_reqs if loads else 0,
                generated={rid: len(state.output_ids) for rid, state in self._manager.rid_to_state.items()},
            )
            write_message(self._writer, [REPORT_ID, None, report])
            await asyncio.sleep(_REPORT_INTERVAL_S)

    async def _answer(self, request_id: int, method: str, params: Any) -> None:
        try:
            message = [request_id, None, await getattr(self, f"do_{method}")(params)]
        except Exception as error:
            message = [request_id, f"{type(error).__name__}: {error}", None]
        write_message(self._writer, message)

    async def do_generate(self, params: dict[str, Any]) -> GenerateResult:
        output = await self._engine.async_generate(
            input_ids=np.asarray(params["input_ids"]).tolist(),
            sampling_params=params["sampling"],
            return_logprob=True,
            logprob_start_len=-1,
            rid=params["rid"],
        )
        meta = output["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("status_code"):
            raise RuntimeError(f"SGLang refused the request: {reason.get('message')}")
        # `meta` of a request that was aborted before it ran lacks the other fields
        tokens = meta.get("output_token_logprobs") or []
        spans = meta.get("weight_versions") if tokens else []
        if spans is None:
            spans = [{"start": 0, "end": len(tokens), "version": meta["weight_version"]}]
        return GenerateResult(
            token_ids=np.array([token[1] for token in tokens], np.int32),
            logprobs=np.array([token[0] for token in tokens], np.float32),
            finish_reason=reason["type"],
            version_spans=[(span["start"], span["end"], int(span["version"])) for span in spans],
            prompt_tokens=meta.get("prompt_tokens", len(params["input_ids"])),
            cached_tokens=meta.get("cached_tokens", 0),
            retractions=meta.get("num_retractions", 0),
        )

    async def do_score(self, params: dict[str, Any]) -> list[float]:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        inputs = [np.asarray(ids).tolist() for ids in params["input_ids"]]
        rids = [f"{params['rid']}{number:06x}" for number in range(len(inputs))]
        request = EmbeddingReqInput(input_ids=inputs, rid=rids)
        outputs: list[dict[str, Any]] = await anext(self._manager.generate_request(request, None))
        return [float(output["embedding"][0]) for output in outputs]

    async def do_abort(self, params: dict[str, Any]) -> None:
        self._manager.abort_request(rid=params["rid"], abort_all=not params["rid"])

    async def do_begin_update(self, params: None) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _demand(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def do_load_bucket(self, params: dict[str, Any]) -> None:
        """Load a safetensors file by path, or a device buffer by one handle per tensor-parallel rank."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from rstar2_megatron.rollout.engine.weight_hooks import LOADER

        tp_size = self._server_args["tp_size"]
        if "handles" in params:
            kind, contents = "handle", params["handles"]
        else:
            kind, contents = "path", [params["path"].encode()] * tp_size
        payloads = [pickle.dumps([(kind, torch.frombuffer(bytearray(content), dtype=torch.uint8))]) for content in contents]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False, weight_version=params["version"]
        )
        _demand(await self._manager.update_weights_from_tensor(update, None))

    async def do_end_update(self, params: None) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _demand(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def do_flush_cache(self, params: None) -> bool:
        return bool((await self._manager.flush_cache()).success)

    async def do_release_memory(self, params: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=params["tags"]))

    async def do_resume_memory(self, params: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=params["tags"]))

    async def do_start_profile(self, params: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ProfileReq

        await self._manager.start_profile(ProfileReq(**params))

    async def do_stop_profile(self, params: None) -> None:
        await self._manager.stop_profile()

    async def do_checksums(self, params: None) -> dict[str, int]:
        from rstar2_megatron.rollout.engine.weight_hooks import CHECKSUM_METHOD

        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            call = lambda: self._engine.collective_rpc(CHECKSUM_METHOD, path=file.name)  # noqa: E731
            await asyncio.get_running_loop().run_in_executor(self._rpc_thread, call)
            sums: dict[str, int] = json.load(file)
            return sums


def _demand(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise RuntimeError(message)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # imported by its full name, so that SGLang's spawned children can unpickle the functions above
    from rstar2_megatron.rollout.engine import process as engine_process

    engine_process.main()
