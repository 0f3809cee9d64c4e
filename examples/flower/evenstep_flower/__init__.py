"""Federated training whose nodes differ in speed, with Flower and evenstep."""
