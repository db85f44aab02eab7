-- Fences the rollout and begins to read it: no put succeeds from here on.
-- 1  incarnation to give the rollout if it is new
-- 2  snapshot id to give it if it is not frozen yet
-- 3  bytes to read at once
-- Reply    OK, snapshot id, {records, intents, failures, refusals, blocks, ids, bytes, fields of the hash},
--          step to read on from, rows (see collect_rows) | RETIRED
-- Repeat   safe: the same snapshot id, and the same version unless something was marked since
local state, err = load_state()
if err then return err end
if state and state.status == 'retired' then return reply('RETIRED', state) end
state = state or new_state(arg(1))
if state.status == 'open' then
  keep(state)
  state.status, state.snapshot, state.version = 'frozen', timed(arg(2)), state.version + 1
  write(state)
end
local rows = {}
local next_seq = collect_rows(state, 1, tonumber(arg(3)), rows)
return reply('OK', state, state.snapshot,
  {state.records, state.intents, state.failures, state.refusals, state.blocks, state.ids, state.bytes,
    redis.call('HLEN', key)},
  next_seq, rows)
