"""Reading: a Kineto trace file of any writer becomes columns."""
