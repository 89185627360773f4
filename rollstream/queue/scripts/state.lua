-- state: the frontier and the terminal ids above it, for a checkpoint. Read-only.
-- argv: -
-- keys: m HASH, cur STRING
-- group: -
-- member: -
-- answer: frontier bitmap (first byte holds id 8 * floor(frontier / 8)) epoch | lost
-- repeat: the same answer
local run = read(M, 'frontier', 'base', 'epoch')
if not run.frontier then return {'lost'} end
local skip = math.floor((tonumber(run.frontier) - tonumber(run.base)) / 8)
return {run.frontier, call('GETRANGE', K .. 'cur', skip, -1), run.epoch}
