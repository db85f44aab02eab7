-- Compares the rollout with what another server, which may have had more of it, acknowledged.
-- 1  incarnation to give the rollout if it is new
-- 2  incarnation of the attempt that was known
-- 3  highest number of a step that was acknowledged
-- 4  number of the newest step of the one who asks, 0 if there is none
-- 5  how its trace ends
-- Reply    OK | LOST (another attempt, a frozen one with fewer steps, one that is not marked yet where that number
--          went to another step, or none: the rollout is now incomplete) |
--          RETIRED (nothing changed)
-- Repeat   safe
-- In an open rollout the number is claimed: the steps that are missing up to there can still be put back, and are
-- holes that show until then.
local state, err = load_state()
if err then return err end
local highest = tonumber(arg(3))
if state and state.status == 'retired' then return reply('RETIRED', state) end
if not state or state.incarnation ~= arg(2) then return mark_lost_rollout(state, arg(1)) end
local trace = redis.call('HGET', key, 'o:' .. arg(4))
local moved = trace and read_trace(trace) ~= arg(5)
if moved and tonumber(state.failures) == 0 then return mark_lost_rollout(state) end
if tonumber(state.seq) >= highest then return reply('OK', state) end
if state.status ~= 'open' then return mark_lost_rollout(state) end
state.seq = highest
write(state)
return reply('OK', state)
