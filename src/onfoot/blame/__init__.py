"""Which training examples made a model say this? The run's own training, differentiated by replaying it backwards."""
