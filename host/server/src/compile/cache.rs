//! Compiled components in memory: those that run, those that a rollback returns to, and those that
//! were just used.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use oncebox_runtime::LoadedComponent;

use super::pool::Digest;

/// Longest stay of a component that no handler uses.
const IDLE_MAX: Duration = Duration::from_secs(600);
/// Most components that stay without running, and most bytes of their code.
const COUNT_MAX: usize = 64;
const BYTES_MAX: usize = 1 << 30;

#[derive(Default)]
pub(super) struct Kept {
    components: HashMap<Digest, CachedComponent>,
}

struct CachedComponent {
    component: LoadedComponent,
    used_at: Instant,
}

impl Kept {
    pub(super) fn get(&mut self, digest: &[u8]) -> Option<LoadedComponent> {
        let entry = self.components.get_mut(digest)?;
        entry.used_at = Instant::now();
        Some(entry.component.clone())
    }

    pub(super) fn put(&mut self, digest: &[u8], component: &LoadedComponent) {
        self.components.insert(
            digest.to_vec(),
            CachedComponent { component: component.clone(), used_at: Instant::now() },
        );
        self.shrink(COUNT_MAX, BYTES_MAX, &[]);
    }

    /// Forgets components that no handler holds: after some minutes, unless a slot runs one or ran
    /// it before.
    pub(super) fn let_go(&mut self, warm: &[Digest]) {
        self.let_go_after(IDLE_MAX, warm);
        self.shrink(COUNT_MAX, BYTES_MAX, warm);
    }

    fn let_go_after(&mut self, idle: Duration, warm: &[Digest]) {
        let now = Instant::now();
        self.components.retain(|digest, entry| {
            if entry.component.is_shared() {
                entry.used_at = now;
            }
            now.duration_since(entry.used_at) < idle || warm.contains(digest)
        });
    }

    /// Forgets components, the longest unused first and warm ones last, until the rest fits. A
    /// component that a handler holds is left out: it would stay in memory anyhow.
    fn shrink(&mut self, count_max: usize, bytes_max: usize, warm: &[Digest]) {
        let idle = self.components.iter().filter(|(_, entry)| !entry.component.is_shared());
        let mut idle: Vec<_> = idle
            .map(|(digest, entry)| {
                (warm.contains(digest), entry.used_at, digest.clone(), entry.component.code_bytes())
            })
            .collect();
        idle.sort();
        let mut count = idle.len();
        let mut bytes: usize = idle.iter().map(|(.., size)| size).sum();
        for (_, _, digest, size) in idle {
            if count <= count_max && bytes <= bytes_max {
                return;
            }
            self.components.remove(&digest);
            count -= 1;
            bytes -= size;
        }
    }
}

#[cfg(test)]
mod tests {
    use oncebox_runtime::{RuntimeConfig, WasmRuntime};

    use super::*;

    const LEDGER: &[u8] = include_bytes!("../../../../guest-examples/components/ledger.wasm");

    fn digests(kept: &Kept) -> Vec<u8> {
        let mut found: Vec<_> = kept.components.keys().map(|digest| digest[0]).collect();
        found.sort();
        found
    }

    #[tokio::test]
    async fn what_runs_and_what_a_rollback_needs_stays() {
        let runtime =
            WasmRuntime::new(RuntimeConfig { instances_max: 1, ..RuntimeConfig::default() })
                .expect("an engine");
        let mut kept = Kept::default();
        for name in 0..4 {
            kept.put(&[name], &runtime.load(LEDGER).await.expect("sound"));
        }
        let running = kept.get(&[0]).expect("kept");
        kept.let_go_after(Duration::from_secs(60), &[]);
        assert_eq!(digests(&kept), [0, 1, 2, 3], "all were used just now");
        kept.get(&[1]);
        kept.shrink(2, usize::MAX, &[]);
        assert_eq!(digests(&kept), [0, 1, 3], "the one unused for longest goes");
        kept.shrink(1, usize::MAX, &[vec![3]]);
        assert_eq!(digests(&kept), [0, 3], "what is warm goes last");
        kept.let_go_after(Duration::ZERO, &[vec![3]]);
        assert_eq!(digests(&kept), [3], "zero is over at once, also for what runs");
        drop(running);
        kept.shrink(9, 1, &[vec![3]]);
        assert!(digests(&kept).is_empty(), "no room at all");
    }
}
