"""Grade-school maths: GSM8K itself, generated problems of its kind, and the tiny policy that learns them."""
