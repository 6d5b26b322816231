"""Any program that speaks to a model, trained: OpenAI's and Anthropic's APIs over an Atropos policy."""
