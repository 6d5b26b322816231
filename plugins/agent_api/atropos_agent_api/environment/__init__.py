"""The environment `agent`: any program that speaks to a model, run on tasks and scored."""
