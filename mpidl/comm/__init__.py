"""Sums and messages between ranks, over a transport that receives MPI and a guard."""
