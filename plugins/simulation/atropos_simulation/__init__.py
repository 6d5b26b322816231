"""`atropos simulate`: a discrete-event model of the loop, to plan past the machines that there are."""
