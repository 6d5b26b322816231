"""Parts that engines and trainers share because they run a model in torch."""
