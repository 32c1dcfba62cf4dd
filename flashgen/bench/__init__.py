"""Bench: flashgen beside its peers in one run, `flashgen bench`.

    cases -> contenders -> judged -> raced -> record, listing, picture

run.py has the story; measure.py, left of here, the protocol.
"""
