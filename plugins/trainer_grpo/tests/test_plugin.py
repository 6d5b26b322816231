"""The package offers its trainer without importing torch."""

import subprocess
import sys


def test_offering_the_trainer_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from atropos_core.plugins import load_plugins; "
        "offer = load_plugins().registry.find('trainer', 'grpo'); "
        "offer.provider.config(); "
        "assert offer.provider.runs_in == 'process'; "
        "assert offer.provider.transports(None) == {'posix_shm', 'cuda_ipc', 'checkpoint'}; "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
