//! Signatures of requests to storage that speaks S3: SHA-256, and HMAC with it.

use hmac::{Hmac, KeyInit, Mac};
use object_store::{
    Error, Result,
    client::{
        CryptoProvider, DigestAlgorithm, DigestContext, HmacContext, Signer, SigningAlgorithm,
    },
};
use sha2::{Digest, Sha256};

/// The algorithms of the crates that the host uses elsewhere.
#[derive(Debug)]
pub(crate) struct Signing;

impl CryptoProvider for Signing {
    fn digest(&self, algorithm: DigestAlgorithm) -> Result<Box<dyn DigestContext>> {
        match algorithm {
            DigestAlgorithm::Sha256 => {
                Ok(Box::new(Hashing { state: Sha256::new(), digest: [0; 32] }))
            }
            _ => Err(unknown()),
        }
    }

    fn hmac(&self, algorithm: DigestAlgorithm, secret: &[u8]) -> Result<Box<dyn HmacContext>> {
        match algorithm {
            DigestAlgorithm::Sha256 => {
                let state =
                    Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
                Ok(Box::new(Keyed { state, code: [0; 32] }))
            }
            _ => Err(unknown()),
        }
    }

    fn sign(&self, _: SigningAlgorithm, _: &[u8]) -> Result<Box<dyn Signer>> {
        Err(unknown()) // S3 signs by HMAC
    }
}

fn unknown() -> Error {
    Error::NotSupported { source: "this algorithm is not used for S3".into() }
}

struct Hashing {
    state: Sha256,
    digest: [u8; 32],
}

impl DigestContext for Hashing {
    fn update(&mut self, data: &[u8]) {
        self.state.update(data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.digest = self.state.clone().finalize().into();
        Ok(&self.digest)
    }
}

struct Keyed {
    state: Hmac<Sha256>,
    code: [u8; 32],
}

impl HmacContext for Keyed {
    fn update(&mut self, data: &[u8]) {
        self.state.update(data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.code = self.state.clone().finalize().into_bytes().into();
        Ok(&self.code)
    }
}
