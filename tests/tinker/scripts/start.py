"""Save a new adapter with seeded first weights: start.py OUT MODEL. Recipes give no seed, so two runs that are compared start from it."""

import json
import sys
from pathlib import Path

import tinker

with tinker.ServiceClient() as service:
    training = service.create_lora_training_client(base_model=sys.argv[2], rank=32, seed=1).result()
    Path(sys.argv[1]).write_text(json.dumps(training.save_state("start").result().path))
