"""The protocol's protobuf bodies, read and written without generated code."""
