"""Run vLLM's API server on a socket that is already bound: `python -m atropos_engine_vllm.server_main DESCRIPTOR FLAG...`.

It does the same as vLLM's own `api_server` main, except that no other process can take the port before the server listens.
"""

from __future__ import annotations

import signal
import socket
import sys


def main() -> None:
    descriptor, flags = int(sys.argv[1]), sys.argv[2:]
    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.openai.api_server import run_server_worker
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.system_utils import decorate_logs, set_ulimit

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    configure_logging_from_args(arguments)
    validate_parsed_serve_args(arguments)
    decorate_logs("APIServer", skip_if_decorated=True)
    set_ulimit()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupt)  # until uvicorn's own handler is there
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    host, port = listener.getsockname()
    uvloop.run(run_server_worker(f"http://{host}:{port}", listener, arguments))


if __name__ == "__main__":
    main()
