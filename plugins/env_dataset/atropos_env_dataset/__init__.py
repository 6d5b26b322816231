"""Your own rows of prompts and answers: files, or a data set of the Hugging Face hub."""
