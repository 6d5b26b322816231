"""The APIs that agents speak: each turns a request's JSON into a `Call`, and an `Answer` into JSON or server-sent events."""
