"""The paper's experiment: uniform batches against SDO's and its ablations, from a YAML file a setting.

``python -m experiments run SETTING`` trains the cells that are missing, measures each and keeps its figures as a
small JSON file; ``table`` writes the tables, ``page`` the results page, ``status`` what is measured and what is not.
"""
