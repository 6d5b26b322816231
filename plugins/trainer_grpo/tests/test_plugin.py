"""The package offers its trainer without importing torch."""

import subprocess
import sys


def test_offering_the_trainer_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from atropos_core.plugins.manager import load_plugins; "
        "offer = load_plugins().registry.find('trainer', 'grpo'); "
        "options = offer.provider.options(); "
        "assert offer.provider.runs_in == 'process'; "
        "every = {'posix_shm', 'cuda_ipc', 'copy', 'broadcast', 'checkpoint', 'adapter'}; "
        "assert offer.provider.transports(options) == every; "
        "lora = {'rank': 16, 'alpha': 32.0, 'targets': ['all-linear']}; "
        "assert offer.provider.announces(options) == {'lora': lora, 'distillation': None}; "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
