//! Limits the number of connections, so that the database can always open files.

use axum::{Extension, Router};
use axum_server::accept::Accept;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Lets the process open as many files as the system allows, and returns the number of connections: half of them.
pub(crate) fn max() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // A failure leaves the limit as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let files = getrlimit(Resource::Nofile).current.or(current);
    let connections = files.map_or(Semaphore::MAX_PERMITS, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    connections.min(Semaphore::MAX_PERMITS)
}

/// Closes connections beyond a number.
#[derive(Clone, Debug)]
pub(crate) struct LimitedAcceptor<A> {
    acceptor: A,
    connections: Arc<Semaphore>,
}

impl<A> LimitedAcceptor<A> {
    pub(crate) fn new(acceptor: A, connections: usize) -> LimitedAcceptor<A> {
        LimitedAcceptor { acceptor, connections: Arc::new(Semaphore::new(connections)) }
    }
}

impl<A: Accept<TcpStream, Router>> Accept<TcpStream, Router> for LimitedAcceptor<A>
where
    A::Future: Send + 'static,
{
    type Stream = A::Stream;
    type Service = A::Service;
    type Future = Pin<Box<dyn Future<Output = io::Result<(A::Stream, A::Service)>> + Send>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() else {
            return Box::pin(async { Err(io::Error::other("too many connections")) });
        };
        // The connection has the router until it ends.
        Box::pin(self.acceptor.accept(stream, router.layer(Extension(Arc::new(permit)))))
    }
}
