"""Checks before training that a module can be served. API: ``lightning.pytorch.serve.ServableModuleValidator``."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_compat.callbacks.callback import Callback
from torch_compat.core.export import eval_mode
from torch_compat.serve.servable_module import ServableModule
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

_logger = logging.getLogger("lightning.pytorch.serve")


class ServableModuleValidator(Callback):
    """Serves the module once before training, sends it its own payload over HTTP, and compares the response.

    The server is of Python's library and runs in this process: neither fastapi nor uvicorn is needed.

    Args:
        optimization: None; compiled forms of a module are checked where they are made.
        server: ``"fastapi"``, whose routes are served: ``GET /ping`` and ``POST /serve``.
        host: where the server listens.
        port: its port; 0 takes a free one.
        timeout: seconds to wait for the response.
        exit_on_failure: raise if the module cannot be served; else :attr:`successful` says it.

    Raises:
        NotImplementedError: another optimization or server.
    """

    def __init__(
        self,
        optimization: Literal["trace", "script", "onnx", "tensorrt"] | None = None,
        server: Literal["fastapi", "ml_server", "torchserve", "sagemaker"] = "fastapi",
        host: str = "127.0.0.1",
        port: int = 8080,
        timeout: int = 20,
        exit_on_failure: bool = True,
    ) -> None:
        super().__init__()
        if optimization is not None:
            raise NotImplementedError(
                f"The optimization {optimization} is currently not supported: leave it out; the module is served unchanged"
            )
        if server != "fastapi":
            raise NotImplementedError(
                f"Only the fastapi server is currently supported. `server` is {server!r}; leave it out to serve fastapi's routes"
            )
        self.optimization = optimization
        self.server = server
        self.host = host
        self.port = port
        self.timeout = timeout
        self.exit_on_failure = exit_on_failure
        self.resp: dict[str, Any] | None = None
        self.error: Exception | None = None

    @property
    def successful(self) -> bool | None:
        """Whether the module was served; None before that was tried."""
        if self.error is not None:
            return False
        return None if self.resp is None else True

    def state_dict(self) -> dict[str, Any]:
        return {
            "successful": self.successful,
            "optimization": self.optimization,
            "server": self.server,
        }

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Serve the module once.

        Raises:
            TypeError: it is no ``ServableModule``.
            MisconfigurationException: the run has several processes.
            RuntimeError: it cannot be served, and ``exit_on_failure``.
        """
        if not isinstance(pl_module, ServableModule):
            raise TypeError(
                f"The provided model should be subclass of {ServableModule.__qualname__}, found {type(pl_module).__name__}"
            )
        if trainer.num_nodes > 1:
            raise MisconfigurationException(
                "ServableModuleValidator checks a module on one process; on several, check it in a run of its own"
            )
        try:
            with eval_mode(pl_module), _serving(pl_module, self.host, self.port) as address:
                _request(f"{address}/ping", None, self.timeout)
                self.resp = _request(f"{address}/serve", pl_module.configure_payload(), self.timeout)
            expected = pl_module.configure_response()
            if expected and expected != self.resp:
                raise ValueError(f"The expected response {expected} doesn't match the generated one {self.resp}.")
        except Exception as error:  # the module's own code, over HTTP: anything
            self.error = error
            if self.exit_on_failure:
                raise RuntimeError(f"The model isn't servable: {error}") from error
            _logger.warning("The model isn't servable: %s", error)
        else:
            _logger.info("Your model is servable and the received payload was %s.", self.resp)


@contextmanager
def _serving(module: ServableModule, host: str, port: int) -> Iterator[str]:
    """A server of the module; gives its address."""
    deserializers, serializers = module.configure_serialization()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200 if self.path == "/ping" else 404, True)

        def do_POST(self) -> None:
            if self.path != "/serve":
                self._reply(404, {"detail": "Not Found"})
                return
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
                with torch.no_grad():
                    outputs = module.serve_step(**{name: read(body[name]) for name, read in deserializers.items()})
                self._reply(200, _as_json(outputs, serializers))
            except Exception as error:  # told to whoever asked
                self._reply(500, {"detail": f"{type(error).__name__}: {error}"})

        def _reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            _logger.debug(format, *args)

    server = ThreadingHTTPServer((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, name="ServableModuleValidator", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _as_json(outputs: Any, serializers: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise TypeError(f"The return from serve_step should be a dict, found {type(outputs).__name__}")
    missing = [name for name in serializers if name not in outputs]
    if missing:
        raise KeyError(f"serve_step gave no {missing}, which configure_serialization names; it gave {list(outputs)}")
    return {name: write(outputs[name]) for name, write in serializers.items()}


def _request(url: str, content: Any, timeout: float) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # to this host, past any proxy
    try:
        with opener.open(request, timeout=timeout) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read()).get("detail", str(error))) from error
