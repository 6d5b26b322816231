"""`atropos simulate`: a discrete-event model of the loop, to plan for more machines than you have."""
