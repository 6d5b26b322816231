"""The endpoints of the old Atropos protocol: registrations, groups and pieces of groups coming in, batches going out."""
