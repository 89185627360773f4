"""New weights: the pause that workers confirm, what engines are told, and the resume."""
