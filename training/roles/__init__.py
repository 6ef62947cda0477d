"""Base classes of the roles. A recipe subclasses them and says its loss; any method may be overridden."""
