"""Members that come and go without a restart: evenstep's sizes under the quorum of torchft, an extra.

torchft decides who is a member, sends the state to replicas that join, and says whether a step counts. Here follow the
sizes for these members, and the slice of the epoch that they compute. A step that does not count changes nothing.
"""
