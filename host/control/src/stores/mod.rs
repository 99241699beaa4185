//! Stores: places from which hosts fetch the payloads that messages refer to. The operator's
//! settings name the stores that exist. A tenant has a bucket, a prefix and an access key of its
//! own in each store that it uses; the key is sealed as its credentials are.

// The stores that the settings name.
pub(crate) mod settings;
// The place that a reference names.
mod place;
// A tenant's access to a store.
pub(crate) mod access;
// The fetch of an object under that access.
pub(crate) mod fetch;
