//! A bucket of storage that speaks S3, by the client and the signatures of this crate.

use std::sync::Arc;

use object_store::{
    RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, Checksum},
};

use crate::{ArchiveError, client::Connector, signing::Signing};

/// Access to a bucket. The endpoint was checked before.
pub(crate) struct BucketAccess<'a> {
    /// Name of the bucket.
    pub(crate) bucket: &'a str,
    /// URL of the server; empty for that of AWS in the region.
    pub(crate) endpoint: &'a str,
    /// Region of the bucket.
    pub(crate) region: &'a str,
    /// Id of the access key.
    pub(crate) access_key_id: &'a str,
    /// The access key itself.
    pub(crate) secret_access_key: &'a str,
}

impl BucketAccess<'_> {
    /// Returns the bucket, over connections of the connector. Opens none.
    pub(crate) fn open(
        &self,
        connector: Connector,
        retries: RetryConfig,
    ) -> Result<AmazonS3, ArchiveError> {
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(self.bucket)
            .with_region(self.region)
            .with_access_key_id(self.access_key_id)
            .with_secret_access_key(self.secret_access_key)
            .with_allow_http(true) // the endpoint was checked
            .with_crypto_provider(Arc::new(Signing))
            .with_http_connector(connector)
            // A bucket with a lock against deletion wants it.
            .with_checksum_algorithm(Checksum::SHA256)
            .with_disable_bulk_delete(true) // not every server has it
            .with_retry(retries);
        if !self.endpoint.is_empty() {
            builder = builder.with_endpoint(self.endpoint.trim_end_matches('/'));
        }
        builder.build().map_err(|error| ArchiveError::Settings(error.to_string()))
    }
}
