"""`atropos import`: a native environment's skeleton from a file that was written for atroposlib."""
