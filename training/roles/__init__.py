"""Base classes of the roles. A recipe subclasses them and defines its loss. Any method may be overridden."""
