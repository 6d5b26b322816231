"""Machines that are none: network namespaces of this one, each with an address, a host name and processes of its own."""
