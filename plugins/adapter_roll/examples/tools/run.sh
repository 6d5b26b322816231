#!/usr/bin/env bash
# Trains in ROLL with the roll.yaml next to this file. ROLL is a checkout of alibaba/ROLL, unmodified.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${ROLL:?set ROLL to the directory of a checkout of alibaba/ROLL}"
export PYTHONPATH="$ROLL${PYTHONPATH:+:$PYTHONPATH}"
python -c 'from atropos_adapter_roll.managers import TrajEnvManager'
exec python "$ROLL/examples/start_agentic_pipeline.py" \
  --config_path "$(realpath --relative-to="$ROLL/examples" "$here")" --config_name roll "$@"
