//! The files with the handlers' tables. Each is a migration of the tenant, applied once: a new file
//! is applied. A changed one is only reported, since the tables stay as they were made.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use oncebox_api::wire;

use super::TENANT;
use crate::{
    api::{Api, path},
    migration::Migration,
};

/// Pause between two looks at the files. A file that is equal in two looks is no longer being
/// written.
const POLL: Duration = Duration::from_secs(1);

/// The files, with the state that their tables were made from.
pub(super) struct Schema {
    /// Text on how to make new tables, as the end of a sentence.
    anew: String,
    files: Vec<SchemaFile>,
}

struct SchemaFile {
    path: PathBuf,
    /// SHA-256 of the content that was applied.
    applied: String,
    /// SHA-256 of the content at the last look, and of the content last reported.
    seen: String,
    told: String,
}

/// Reads the files, which must exist and be readable.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Migration>> {
    paths.iter().map(|path| read_one(path)).collect()
}

fn read_one(path: &Path) -> Result<Migration> {
    Migration::read(path, &|path| std::fs::read(path))
}

impl Schema {
    /// Applies the files that were not applied before, and reports those that changed since.
    pub(super) async fn apply(api: &Api, files: Vec<Migration>, anew: String) -> Result<Self> {
        let route = path(&["tenants", TENANT, "migrations"]);
        let known: Vec<wire::MigrationBody> = api.get(&route).await?;
        let mut schema = Self { anew, files: Vec::new() };
        for file in files {
            let shown = file.path.display();
            let applied = match known.iter().find(|known| known.name == file.name) {
                Some(known) => known.digest.clone(),
                None => {
                    let applied: wire::MigrationBody = api
                        .post(&route, &file.to_send())
                        .await
                        .with_context(|| format!("`{shown}`"))?;
                    println!("applied   {shown}, which is new");
                    applied.digest
                }
            };
            let mut file =
                SchemaFile { told: applied.clone(), applied, seen: file.digest, path: file.path };
            file.tell(&schema.anew);
            schema.files.push(file);
        }
        Ok(schema)
    }

    /// Reports each change of a file, for ever.
    pub(super) async fn watch(mut self) {
        loop {
            tokio::time::sleep(POLL).await;
            for file in &mut self.files {
                // A file that is missing for a moment is being written.
                if let Ok(now) = read_one(&file.path) {
                    let stands_still = file.seen == now.digest;
                    file.seen = now.digest;
                    if stands_still {
                        file.tell(&self.anew);
                    }
                }
            }
        }
    }
}

impl SchemaFile {
    /// Reports that the file differs from the one that the tables were made from, once for each
    /// content.
    fn tell(&mut self, anew: &str) {
        if self.seen == self.told {
            return;
        }
        self.told.clone_from(&self.seen);
        let path = self.path.display();
        if self.seen == self.applied {
            println!("schema    {path} is again what the tables were made of");
            return;
        }
        println!("schema    {path} has changed, and the tables stay as they were made");
        println!(
            "          to change them, write what is new into a file of its own: oncebox tenant \
                schema apply {TENANT} more.sql"
        );
        println!("          to make them anew, without their rows and messages: {anew}");
    }
}
