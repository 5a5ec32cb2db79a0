//! Plans: lookup order, record keys, records on disk, and the plans of this process.
