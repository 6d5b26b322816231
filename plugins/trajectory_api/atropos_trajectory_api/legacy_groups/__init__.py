"""Groups of the old Atropos protocol: fourteen keys and masks of -100 in JSON, and the form in which the hub stores them."""
