//! DNS.

use std::{
    io,
    net::{IpAddr, ToSocketAddrs},
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{sync::Semaphore, task::spawn_blocking};

/// Lookups of this process at a time. Each holds a thread for as long as the servers of a name keep
/// silent. This is half of the threads that Tokio has for such work: the rest is for others.
static LOOKUPS: Semaphore = Semaphore::const_new(256);

/// Looks names up.
pub trait Resolve: Send + Sync {
    /// Returns all addresses of a name, in the order in which they are tried. The name is in lower
    /// case and Punycode, without a dot at its end, and is no address.
    ///
    /// # Errors
    ///
    /// The resolver's error where the name has no address, or no server answers.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The resolver of the operating system, with at most 256 lookups at a time. A lookup that a
/// request no longer waits for still holds a thread, until the operating system gives it up.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        async move {
            let turn = LOOKUPS.acquire().await.map_err(io::Error::other)?; // nobody closes it
            let name = name.to_owned();
            let lookup = spawn_blocking(move || -> io::Result<Vec<IpAddr>> {
                let _turn = turn; // to the end of the lookup, which nothing interrupts
                let found = (name.as_str(), 0_u16).to_socket_addrs()?;
                Ok(found.map(|address| address.ip()).collect())
            });
            lookup.await.map_err(io::Error::other)?
        }
        .boxed()
    }
}
